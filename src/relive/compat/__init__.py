"""Drop-in modules: classes with the names and arguments of other libraries, built on relive's core."""
