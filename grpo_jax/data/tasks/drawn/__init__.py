"""Problems about small images that the tasks draw, for models with a vision tower."""
