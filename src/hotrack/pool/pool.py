"""Pool: the public face. One run loop per device group owns that group's state; this file only routes to it."""
