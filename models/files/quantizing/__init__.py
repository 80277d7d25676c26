"""Model quantization: recipes, importance matrices, conversion tensor by tensor."""
