"""Says which folder holds which package: kernels/, pipelines/ and interfaces/ stand at the top of the repository and install inside ssta.

A checkout has links that say the same to static tools: src/ssta, ssta/kernels, ssta/pipelines and ssta/interfaces. With them, an editable
install is a plain path to src/, which editors and mypy follow; the top of the repository must not be such a path, because a package named
kernels is Hugging Face's. An sdist holds every file once and no links, as does a checkout on a system that has none.
"""

from pathlib import Path

from setuptools import find_packages, setup

if Path("src/ssta/kernels").is_dir():
    setup(package_dir={"": "src"}, packages=find_packages("src"))
else:
    FOLDERS = {"ssta": "ssta", "ssta.kernels": "kernels", "ssta.pipelines": "pipelines", "ssta.interfaces": "interfaces"}
    setup(package_dir=FOLDERS, packages=[f"{package}.{below}".rstrip(".") for package, folder in FOLDERS.items()
                                         for below in ["", *find_packages(folder)]])
