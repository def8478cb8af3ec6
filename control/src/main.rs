//! The `vipgate` binary.

use std::process::ExitCode;

fn main() -> ExitCode {
    vipgate::cli::main()
}
