"""What a run is made of: its parts, built from a config, and the steps of its loop."""
