"""The READMEs that `init` writes for the operators of server and sites."""

from feddure.flower.app.description import Description
from feddure.flower.deploy.certificates import AUTHORITY_DAYS, SERVER_DAYS
from feddure.flower.deploy.layout import Connection


def for_server(description: Description, secure: bool) -> str:
    """What the server's operator does with the folder."""
    sites = "\n".join(f"| {site} | `sites/{site}.zip` |" for site in description.sites)
    protection = _AUTHORITY if secure else _INSECURE
    return f"""# {description.name}: the server

Sites reach this server at **{description.server.host}, TCP port {description.server.port}**. Open that port, and
only that one.

1. Hand each site its bundle over a channel you trust (it may hold the site's private key):

   | site | bundle |
   |---|---|
{_indented(sites)}

2. Start the server, and leave it running: `feddure federate server .`
3. Start a run, on this machine: `feddure federate run . --method feddure --rounds 50`
4. Look: `feddure federate status .`

{protection}
`federation.yaml` says what all sites agree on (classes, image size, normalisation, sites). After a change every site
needs the new file: make a new folder with `feddure federate init` and hand out new bundles.

All of it is explained in docs/federation.md of feddure.
"""


def for_site(description: Description, connection: Connection, own_key: bool) -> str:
    """What a site's operator does with the bundle."""
    site = connection.site
    key = _OWN_KEY if own_key else _GIVEN_KEY
    classes = "\n".join(f"    IMAGES/labelled/{name}/*" for name in description.classes)
    return f"""# {description.name}: site {site}

This folder lets `{site}` join the federation at {connection.address}. The site needs outgoing TCP to that address
and no open port.

1. `pip install 'feddure[flower]'` (Python 3.11 or 3.12).
2. Put the images in a folder of this shape; any image format that Pillow reads, any size:

{classes}
    IMAGES/unlabelled/*

   Folders of classes you have no images of may be missing; so may `unlabelled`. Where 16-bit files hold 12-bit
   greys, say `--data 'folder:IMAGES?depth=12'` below.
3. Check everything, with this folder as the current one: `feddure federate check . {site} --data IMAGES`
4. Join: `feddure federate site . {site} --data IMAGES`, and leave it running; Ctrl-C leaves the federation. The
   terminal has a line for each round, and says why where the site is refused; Flower's own logs lie in `state/`.

{key if connection.secure else _INSECURE}
Images, file names and labels stay here. What leaves the site: model weights after training on your images, the
number of labelled and unlabelled images, and averages of the training losses. The server chooses what is trained and
for how long, but cannot bring code of its own: this site runs the feddure that you installed. Use an account that can
read IMAGES and little else all the same.
"""


def _indented(lines: str) -> str:
    return "\n".join("   " + line for line in lines.splitlines())


_AUTHORITY = f"""## Keys

- `authority/ca.key` signs the server's certificate ({SERVER_DAYS} days) and is needed again only to renew it.
  Whoever has it can pose as this server. Take it off line now: move it to a place that is not on a network, and
  bring it back for `feddure federate renew . --authority-key FILE`. The authority itself holds for
  {AUTHORITY_DAYS // 365} years.
- `server/server.key` must stay on this machine. `server/nodes/SITE.pub` are the public keys of the sites that may join.
- Once a site has its bundle, remove `sites/SITE/node.key` and `sites/SITE.zip` here: only the site needs them.

"""

_GIVEN_KEY = """`node.key` is this site's private key: whoever has it can join as this site. Keep it readable by one
user only, and ask the server's operator to remove the copy. `ca.crt` lets this site recognise the server.
"""

_OWN_KEY = """This site made its own key: put the private key here as `node.key`, readable by one user only. Nobody
else has it. `ca.crt` lets this site recognise the server.
"""

_INSECURE = """**This federation was made with --insecure: nothing is encrypted and anybody can join. Never use it with
real data.**
"""
