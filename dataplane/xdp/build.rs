//! Compiles the steering program (BPF).

use std::env;
use std::path::PathBuf;
use std::process::Command;

const SOURCE: &str = "bpf/steer.bpf.c";

fn main() {
    println!("cargo:rerun-if-changed={SOURCE}");
    let Some(out) = env::var_os("OUT_DIR") else { panic!("cargo sets OUT_DIR") };
    let object = PathBuf::from(out).join("steer.bpf.o");
    // Debian's multiarch directory for asm/ headers.
    let asm = format!("/usr/include/{}-linux-gnu", env::consts::ARCH);
    let status = Command::new("clang")
        .args(["-O2", "-g", "-Wall", "-Werror", "-target", "bpf", "-mcpu=v3", "-I", &asm, "-c", SOURCE, "-o"])
        .arg(&object)
        .status();
    match status {
        Ok(status) if status.success() => {}
        Ok(status) => panic!("clang could not compile {SOURCE}: {status} (needs clang and libbpf-dev: `make deps`)"),
        Err(error) => panic!("cannot run clang for {SOURCE}: {error} (install it with `make deps`)"),
    }
}
