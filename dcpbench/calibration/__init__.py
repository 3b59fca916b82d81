"""`dcpbench calibrate`: which microbatches to time, the fit of the cost model, its picture, its profile file."""
