"""Questions about drawn charts, whose small print a crop makes readable."""
