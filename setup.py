"""Says which folder holds which package: kernels/ and pipelines/ stand at the top of the repository and install inside ssta.

ssta/kernels and ssta/pipelines are links for editors and type checkers, which follow folders and not this file.
"""

from setuptools import find_packages, setup

FOLDERS = {"ssta": "ssta", "ssta.kernels": "kernels", "ssta.pipelines": "pipelines"}

PACKAGES = [
    f"{package}.{below}".rstrip(".")
    for package, folder in FOLDERS.items() for below in ["", *find_packages(folder, exclude=("kernels*", "pipelines*"))]
]

setup(package_dir=FOLDERS, packages=PACKAGES)
