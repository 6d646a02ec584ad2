"""HTTP: routes, errors, the worker behind them and the playground page."""
