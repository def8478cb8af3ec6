//! Plots: draws SVGs from the JSON lines that the benchmarks print.

mod axis;
mod chart;
mod figures;
mod results;

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use clap::Args;
use serde::Serialize;

/// Options of `vipgate-bench plot`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Output of `path`, `wire --loads` and `failover`: JSON lines, in any order
    results: PathBuf,
    /// Directory of the SVGs, created if it doesn't exist
    #[arg(long, default_value = ".")]
    output: PathBuf,
    /// No effect: results are always JSON
    #[arg(long)]
    json: bool,
}

/// A written file, printed as JSON.
#[derive(Debug, Serialize)]
struct Report {
    benchmark: &'static str,
    file: String,
    /// Drawn points, without those of lines for comparison.
    points: usize,
}

/// Draws all charts for which the file has results.
pub(crate) fn run(options: &Options) -> Result<()> {
    let path = options.results.display();
    let text = fs::read_to_string(&options.results).with_context(|| format!("cannot read {path}"))?;
    let (results, warnings) = results::parse(&text);
    for warning in warnings {
        eprintln!("vipgate-bench: {path}, {warning}");
    }
    ensure!(!text.trim().is_empty(), "{path} is empty: it needs the output of `path`, `wire --loads` or `failover`");
    let figures = figures::draw(&results);
    ensure!(!figures.is_empty(), "{path} has no results of `path`, `wire --loads` or `failover`");
    fs::create_dir_all(&options.output).with_context(|| format!("cannot create {}", options.output.display()))?;
    for figure in figures {
        let file = options.output.join(&figure.name);
        fs::write(&file, figure.chart.to_svg()).with_context(|| format!("cannot write {}", file.display()))?;
        let report = Report { benchmark: "plot", file: file.display().to_string(), points: figure.points };
        println!("{}", serde_json::to_string(&report)?);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;

    /// The names of the written files, or the error.
    fn plot(text: &str) -> Result<Vec<String>> {
        let directory = TempDir::new()?;
        let (results, output) = (directory.path().join("results.jsonl"), directory.path().join("plots"));
        fs::write(&results, text)?;
        run(&Options { results, output: output.clone(), json: false })?;
        fs::read_dir(output)?.map(|file| Ok(file?.file_name().display().to_string())).collect()
    }

    #[test]
    fn a_file_without_results_is_an_error() {
        for text in ["", "\n \n"] {
            let error = plot(text).unwrap_err().to_string();
            assert!(error.contains("is empty: it needs the output of `path`"), "{error}");
        }
        let error = plot("{\"benchmark\": \"wire\"}\n").unwrap_err().to_string();
        assert!(error.contains("has no results of"), "{error}");
        let missing = Options { results: "/nonexistent".into(), output: "/nonexistent".into(), json: false };
        assert!(run(&missing).unwrap_err().to_string().contains("cannot read /nonexistent"));
    }

    #[test]
    fn a_file_with_results_is_drawn() {
        let line =
            r#"{"benchmark":"failover","lease_ttl_ms":600,"router_detection_ms":300,"outages_ms":[[[0.0,500.0]]]}"#;
        assert_eq!(plot(&format!("no JSON\n{line}\n")).unwrap(), ["failover-outages.svg"]);
    }
}
