"""Comparisons that are ready to run: one YAML file each in `presets/`, and the share link that differs from one."""
