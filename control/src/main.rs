//! The `vipgate` binary.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    vipgate::cli::main()
}
