"""Drop-in modules: the classes of other libraries, over relive's core."""
