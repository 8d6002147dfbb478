"""The search for the settings that fit a GPU and train fastest."""
