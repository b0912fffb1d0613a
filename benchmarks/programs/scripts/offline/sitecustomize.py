"""Lets torchvision take made-up data sets for the real ones: it compares their checksums before it reads them."""

import os

import torchvision.datasets.cifar as cifar
import torchvision.datasets.utils as utils


def is_there(path, md5=None):
    """Whether a file is there."""
    return os.path.isfile(path)


cifar.check_integrity = utils.check_integrity = is_there
