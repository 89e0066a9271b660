"""The same methods between real sites: Flower apps, and what server and sites agree on beforehand."""
