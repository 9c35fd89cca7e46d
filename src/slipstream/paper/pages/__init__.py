"""The page of results: sheets of figures, drawings, and the generated page."""
