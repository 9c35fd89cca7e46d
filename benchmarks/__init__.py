"""Scripts that measure; a package, since pyarrow 17 installs one of the same name."""
