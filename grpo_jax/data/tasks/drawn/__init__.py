"""Problems about small images that the tasks draw themselves, for models that see."""
