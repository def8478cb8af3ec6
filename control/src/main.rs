//! The binary `vipgate`.

use std::process::ExitCode;

fn main() -> ExitCode {
    vipgate::cli::main()
}
