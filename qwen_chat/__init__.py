"""A very fast chat bot on ordinary CPUs: llama.cpp behind a Gradio page, one YAML file for the settings."""

__version__ = "0.1.0"
