"""The last stage of the tests' nursery."""

from nests import import_engines

import_engines()
