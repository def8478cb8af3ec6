//! Compiles the BPF programs of the wire benchmark: traffic source, sink and forwarder.

use std::env;
use std::path::PathBuf;
use std::process::Command;

fn main() {
    let Some(out) = env::var_os("OUT_DIR") else { panic!("cargo sets OUT_DIR") };
    println!("cargo:rerun-if-changed=bpf");
    for name in ["source.bpf", "sink.bpf", "forwarder.bpf"] {
        let source = format!("bpf/{name}.c");
        let object = PathBuf::from(&out).join(format!("{name}.o"));
        // Debian's multiarch directory for asm/ headers.
        let asm = format!("/usr/include/{}-linux-gnu", env::consts::ARCH);
        let status = Command::new("clang")
            .args(["-O2", "-g", "-Wall", "-Werror", "-target", "bpf", "-mcpu=v3", "-I", &asm, "-c", &source, "-o"])
            .arg(&object)
            .status();
        match status {
            Ok(status) if status.success() => {}
            Ok(status) => {
                panic!("clang could not compile {source}: {status} (needs clang and libbpf-dev: `make deps`)")
            }
            Err(error) => panic!("cannot run clang for {source}: {error} (install it with `make deps`)"),
        }
    }
}
