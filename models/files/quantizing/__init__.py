"""Quantizing models: recipes, importance matrices, conversion tensor by tensor."""
