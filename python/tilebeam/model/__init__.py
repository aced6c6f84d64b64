"""A GGUF file becomes a model that generates."""
