//! Line clients and their server: `line-traffic clients CONFIG RESULT` and `line-traffic server PORT RECORD`. See
//! `vipgate_tests::lines`.
#![forbid(unsafe_code)]

use std::io;
use std::path::Path;
use std::process::ExitCode;

use vipgate_tests::lines::{run_clients, run_server};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let outcome = match words[..] {
        ["clients", config, result] => run_clients(Path::new(config), Path::new(result)),
        ["server", port, record] => {
            port.parse::<u16>().map_err(io::Error::other).and_then(|port| run_server(port, Path::new(record)))
        }
        _ => Err(io::Error::other("usage: line-traffic clients CONFIG RESULT | server PORT RECORD")),
    };
    if let Err(error) = outcome {
        eprintln!("line-traffic: {error}");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}
