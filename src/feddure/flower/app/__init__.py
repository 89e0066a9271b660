"""The same methods between real sites: Flower apps, and what server and sites agree on beforehand."""

SERVER_APP, CLIENT_APP = "feddure.flower.app.server:app", "feddure.flower.app.client:app"
PUBLISHER, APP_NAME = "feddure", "feddure-federation"
"""What a run's app must name for a site to carry it out."""
