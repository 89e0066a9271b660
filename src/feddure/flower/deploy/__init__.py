"""A real federation: certificates, bundles for sites, and the processes of server and sites around Flower."""
