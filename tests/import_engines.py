"""The last stage of the tests' nursery: importing it imports the engines."""

from nests import import_engines

import_engines()
