from __future__ import annotations

import dataclasses
import re
import subprocess
import sys

import pytest

from flashcute import heuristics
from flashcute.jit import source_text, sources

CONFIG = heuristics.fwd_config("bf16", 128, True, (9, 0))


def write(folder, **files):
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.h").write_text(text)
    return folder


def names(source, *folders):
    return sorted(path.rsplit("/", 1)[1] for path in sources.project_headers(source, folders))


def test_source_text_spells_the_configuration_and_its_name():
    text = source_text(CONFIG)
    assert f'"{CONFIG.full_name}"' in text
    assert ".head_dim = 128" in text and ".dtype = flash::DType::bf16" in text
    assert max(map(len, text.splitlines())) <= 100
    fields = re.findall(r"^    (\..*),$", text, re.MULTILINE)
    assert "{" + ", ".join(fields) + "}" == CONFIG.to_cpp()


def test_source_text_of_a_backward():
    config = heuristics.bwd_config("fp16", 256, "local")
    text = source_text(config)
    assert f'"{config.full_name}"' in text and "*flash_bwd_kernel()" in text
    assert max(map(len, text.splitlines())) <= 100
    fields = re.findall(r"^    (\..*),$", text, re.MULTILINE)
    assert len(fields) == len(dataclasses.fields(config))
    assert "{" + ", ".join(fields) + "}" == config.to_cpp()


def test_headers_are_followed_through_headers_and_once(tmp_path):
    folder = write(
        tmp_path / "a",
        top='#include "deep.h"\n#  include <angled.h>\n',
        deep='#pragma once\n#include "top.h"\n',
        angled="#if 0\n#include <conditional.h>\n#endif\n",
        conditional="",
        unrelated="",
    )
    source = b'#include <vector>\n#include "top.h"\n'
    assert names(source, folder) == ["angled.h", "conditional.h", "deep.h", "top.h"]


def test_header_beside_the_includer_is_found(tmp_path):
    write(tmp_path / "a", top='#include "../b/beside.h"\n')
    write(tmp_path / "b", beside='#include "second.h"\n', second="")
    assert names(b'#include "top.h"\n', tmp_path / "a") == ["beside.h", "second.h", "top.h"]


def test_first_folder_wins(tmp_path):
    first, second = write(tmp_path / "a", x="first"), write(tmp_path / "b", x="second")
    (data,) = sources.project_headers(b'#include "x.h"', (first, second)).values()
    assert data == b"first"


def test_include_of_a_macro_is_refused(tmp_path):
    with pytest.raises(ValueError, match="expected #include to name a file, got #include HEADER"):
        sources.project_headers(b"#define HEADER <x.h>\n#include HEADER\n", (tmp_path,))


def test_kernels_depend_on_the_headers_they_include():
    found = names(source_text(CONFIG).encode(), sources.kernel_include_dir())
    assert {"flash.h", "flash_fwd_launch_template.h", "softmax.h", "mask.h"} <= set(found)


def test_sources_of_an_installed_package_come_first(tmp_path, monkeypatch):
    package = tmp_path / "site-packages" / "flashcute"
    monkeypatch.setattr(sources, "PACKAGE", package)
    assert sources.source_root() == tmp_path / "site-packages"
    (package / "_src").mkdir(parents=True)
    assert sources.source_root() == package / "_src"
    assert sources.kernel_include_dir() == package / "_src" / "csrc" / "flash_attn" / "src"


def test_import_starts_no_process():
    code = "import subprocess; subprocess.Popen = None; import flashcute.jit"
    subprocess.run([sys.executable, "-c", code], check=True)
