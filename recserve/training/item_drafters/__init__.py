"""Training and calibration of draft heads for item search (`speculative` and `nezha`)."""
