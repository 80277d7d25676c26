"""Every operation under every transform: `operations` times `transforms` are `cells`."""
