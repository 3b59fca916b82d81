"""From a run folder or logs to one `Analysis`: read, align, compare, judge. `report` writes it, nothing here does."""
