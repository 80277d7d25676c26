"""How a model's weights and state are laid out on a mesh of devices."""
