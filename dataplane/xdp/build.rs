//! Compiles the steering program (BPF): for packets in one buffer, and for packets in several ("frags").

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

const SOURCE: &str = "bpf/steer.bpf.c";

fn main() {
    println!("cargo:rerun-if-changed={SOURCE}");
    let Some(out) = env::var_os("OUT_DIR") else { panic!("cargo sets OUT_DIR") };
    for (name, section) in [("steer.bpf.o", "xdp"), ("steer_frags.bpf.o", "xdp.frags")] {
        compile(&PathBuf::from(&out).join(name), section);
    }
}

/// Compiles the program for a section, whose name tells the loader which packets it supports.
fn compile(object: &Path, section: &str) {
    // Debian's multiarch directory for asm/ headers.
    let asm = format!("/usr/include/{}-linux-gnu", env::consts::ARCH);
    let status = Command::new("clang")
        .arg(format!("-DXDP_SECTION=\"{section}\""))
        .args(["-O2", "-g", "-Wall", "-Werror", "-target", "bpf", "-mcpu=v3", "-I", &asm, "-c", SOURCE, "-o"])
        .arg(object)
        .status();
    match status {
        Ok(status) if status.success() => {}
        Ok(status) => panic!("clang could not compile {SOURCE}: {status} (needs clang and libbpf-dev: `make deps`)"),
        Err(error) => panic!("cannot run clang for {SOURCE}: {error} (install it with `make deps`)"),
    }
}
