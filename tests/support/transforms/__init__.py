"""Every operation under every transform; `cells` combines `operations` and `transforms`."""
