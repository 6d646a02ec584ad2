"""Load over HTTP: data sets, plans, the generator and its calibration."""
