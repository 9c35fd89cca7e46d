"""The page of results: sheets (tables and figures as records), drawings, and the generated page."""
