"""Those who read rounds while they happen: the coloured explanation in the terminal."""
