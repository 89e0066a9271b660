"""A real federation of sites on Flower: `app` is what trains, `deploy` the commands and walls around it."""
