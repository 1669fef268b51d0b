"""``install``: other packages' names in sys.modules, entered when asked, taken back whole, nothing hidden unasked."""

import importlib
import importlib.util
import sys

import pytest
import torch

from ssta import interfaces
from ssta.interfaces import flex_block_attn_func, install, uninstall

NAME = "flex_block_attn"


def entries():
    return {key: module for key, module in sys.modules.items() if key.split(".")[0] == NAME}


@pytest.fixture(autouse=True)
def nothing_before_and_after():
    """Importing the interfaces entered nothing, and no test leaves anything."""
    assert entries() == {}
    yield
    assert entries() == {}
    with pytest.raises(ValueError, match="must be installed"):
        uninstall(NAME)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Stands for the real one: installed, with a module of its own; imported by nobody yet."""
    folder = tmp_path / NAME
    folder.mkdir()
    (folder / "__init__.py").write_text("def flex_block_attn_func(): return 'real'\n")
    (folder / "utils.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder
    for key in entries():
        del sys.modules[key]


def test_programs_get_our_function():
    install(NAME)
    from flex_block_attn import flex_block_attn_func as by_name
    from flex_block_attn.flex_block_attn_interface import flex_block_attn_func as by_module

    assert by_name is by_module is flex_block_attn_func
    assert sys.modules[NAME].flex_block_attn_interface is sys.modules[f"{NAME}.flex_block_attn_interface"]
    assert importlib.util.find_spec(NAME) is not None
    q, mask = torch.randn(1, 2, 128, 32), torch.ones(2, 2, dtype=torch.bool)
    torch.testing.assert_close(by_name(q, q, q, 64, 64, mask), torch.nn.functional.scaled_dot_product_attention(q, q, q))
    uninstall(NAME)
    assert importlib.util.find_spec(NAME) is None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(NAME)


def test_a_library_whose_name_is_a_function_of_another():
    magi = interfaces.magi.block_sparse_attn
    with install("block_sparse_attn"):
        import block_sparse_attn
        from block_sparse_attn.block_sparse_attn_interface import block_streaming_attn_func

    assert block_sparse_attn.block_streaming_attn_func is block_streaming_attn_func is interfaces.block_streaming_attn_func
    assert block_sparse_attn.block_sparse_attn_func is interfaces.block_sparse_attn_func
    assert interfaces.magi.block_sparse_attn is magi
    assert "block_sparse_attn" not in sys.modules


@pytest.mark.parametrize("module", [f"{NAME}.utils", f"{NAME}.ssta_attention"])
def test_modules_that_we_lack_are_missing(module):
    with install(NAME), pytest.raises(ModuleNotFoundError, match=module):
        importlib.import_module(module)


def test_uninstall_leaves_no_trace():
    before = dict(sys.modules)
    install(NAME)
    assert sys.modules != before
    uninstall(NAME)
    assert sys.modules == before


def test_an_imported_package_comes_back(package):
    real = importlib.import_module(f"{NAME}.utils"), importlib.import_module(NAME)
    before = dict(sys.modules)
    install(NAME, replace=True)
    assert importlib.import_module(NAME).flex_block_attn_func is flex_block_attn_func
    assert f"{NAME}.utils" not in sys.modules
    uninstall(NAME)
    assert sys.modules == before
    assert (importlib.import_module(f"{NAME}.utils"), importlib.import_module(NAME)) == real
    assert real[1].utils is real[0]


def test_an_installed_package_is_found_again(package):
    with install(NAME, replace=True):
        assert importlib.import_module(NAME).flex_block_attn_func is flex_block_attn_func
    assert importlib.import_module(NAME).flex_block_attn_func() == "real"


@pytest.mark.parametrize("imported", [False, True])
def test_a_package_is_not_hidden_unasked(package, imported):
    if imported:
        importlib.import_module(NAME)
    before = dict(sys.modules)
    with pytest.raises(ValueError, match=rf"replace=True.* {'imported from' if imported else 'installed in'} {package}"):
        install(NAME)
    assert sys.modules == before
    assert importlib.import_module(NAME).flex_block_attn_func() == "real"


def test_nor_is_a_mere_folder(tmp_path, monkeypatch):
    (tmp_path / NAME).mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match=f"installed in {tmp_path / NAME}"):
        install(NAME)


def test_an_import_that_is_forbidden_stays_so(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, NAME, None)
        with pytest.raises(ValueError, match="replace=True"):
            install(NAME)
        with install(NAME, replace=True):
            assert importlib.import_module(NAME).flex_block_attn_func is flex_block_attn_func
        assert entries() == {NAME: None}


def test_as_a_context_manager():
    with install(NAME):
        assert NAME in sys.modules
    assert NAME not in sys.modules
    with pytest.raises(RuntimeError, match="inside"), install(NAME):
        raise RuntimeError("inside")
    with install(NAME) as installation:
        uninstall(NAME)
    with install(NAME):
        with installation:
            pass
        assert NAME in sys.modules  # the block of an earlier installation takes back nothing of this one


def test_what_others_put_there_since_is_theirs(package):
    install(NAME, replace=True)
    for key in entries():
        del sys.modules[key]
    real = importlib.import_module(NAME)
    uninstall(NAME)
    assert sys.modules[NAME] is real


@pytest.mark.parametrize("name", ["flashinfer", "", None, ["flex_block_attn"]])
@pytest.mark.parametrize("call", [install, uninstall])
def test_unknown_names(call, name):
    with pytest.raises(ValueError, match=r"name must be one of \['block_sparse_attn', 'flex_block_attn'\], got"):
        call(name)


def test_twice():
    with install(NAME), pytest.raises(ValueError, match=r"got 'flex_block_attn', which is; uninstall\('flex_block_attn'\)"):
        install(NAME, replace=True)


def test_replace_is_a_bool():
    with pytest.raises(TypeError, match="replace must be a bool"):
        install(NAME, replace="yes")
