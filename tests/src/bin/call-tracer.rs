//! Makes calls of a process fail: `call-tracer trace` is the tracer, `call-tracer run COMMAND..` the wrapper of the
//! process. See `vipgate_tests::failing_calls`.
#![forbid(unsafe_code)]

use std::process::ExitCode;

#[cfg(target_arch = "x86_64")]
fn main() -> ExitCode {
    use std::io;

    use vipgate_tests::failing_calls::tracer;

    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let outcome = match arguments.split_first() {
        Some((action, [])) if action == "trace" => tracer::trace_on_command(io::stdin().lock(), io::stdout()),
        Some((action, command)) if action == "run" => Err(tracer::run(command)),
        _ => Err(io::Error::new(io::ErrorKind::InvalidInput, "usage: call-tracer trace | run COMMAND..")),
    };
    if let Err(error) = outcome {
        eprintln!("call-tracer: {error}");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

#[cfg(not(target_arch = "x86_64"))]
fn main() -> ExitCode {
    eprintln!("call-tracer: for x86_64 only");
    ExitCode::FAILURE
}
