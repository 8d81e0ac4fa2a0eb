"""Presets, one YAML file each in `presets/`, and share links, which contain differences from a preset."""
