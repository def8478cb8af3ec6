//! `vipgate policy accept-empty`: accepts an empty policy source, at a gateway with policy in files or a policy server.

use std::fmt::Write;
use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

use super::show::block_on;
use super::{Format, policy};
use crate::admin::server::EmptySource;
use crate::admin::{Client, Request};
use crate::command_error::CommandError;
use crate::output;
use crate::output::sanitize;
use crate::xds::proto::AcceptEmptyRequest;

/// Arguments of `vipgate policy accept-empty`.
#[derive(Clone, Debug, Args)]
pub(super) struct AcceptEmpty {
    /// Admin socket of a gateway whose policy is in files
    #[arg(long, value_name = "PATH", default_value = "/run/vipgate/gateway.sock", conflicts_with = "server")]
    socket: PathBuf,
    /// URL of a policy server, instead of a gateway
    #[arg(long, value_name = "URL")]
    server: Option<String>,
    #[command(flatten)]
    files: policy::TlsArgs,
    /// Output format
    #[arg(short, long, value_enum, default_value_t = Format::Table)]
    output: Format,
}

/// Objects that are out of force now, by file or key.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
struct Accepted {
    objects: u64,
    #[serde(rename = "texts")]
    sources: Vec<EmptySource>,
}

pub(super) fn run(args: &AcceptEmpty) -> Result<(), CommandError> {
    let sources: Vec<EmptySource> = if let Some(url) = &args.server {
        let request = async |mut client: policy::StatusClient| client.accept_empty(AcceptEmptyRequest {}).await;
        let reply = block_on(policy::call(url, &args.files, request))?;
        reply.texts.into_iter().map(|it| EmptySource { name: it.name, objects: it.objects }).collect()
    } else {
        block_on(async { Ok(Client::connect(&args.socket).await?.ask(&Request::AcceptEmpty).await?) })?
    };
    let accepted = Accepted { objects: sources.iter().map(|source| source.objects).sum(), sources };
    match args.output {
        Format::Json => output::json(&accepted),
        Format::Table => output::print(&sanitize(&table(&accepted))),
    }
}

fn table(accepted: &Accepted) -> String {
    if accepted.sources.is_empty() {
        return "the empty source is accepted: the policy is empty\n".to_owned();
    }
    let count = |objects: u64| if objects == 1 { "1 object".to_owned() } else { format!("{objects} objects") };
    let mut out = format!("out of force: {}\n", count(accepted.objects));
    for EmptySource { name, objects } in &accepted.sources {
        // Writing to a String can't fail.
        let _ = writeln!(out, "  {name}: {}", count(*objects));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_out_of_force_are_counted_by_source() {
        let source = |name: &str, objects| EmptySource { name: name.to_owned(), objects };
        let accepted = Accepted { objects: 3, sources: vec![source("a.yaml", 2), source("b.yaml", 1)] };
        assert_eq!(table(&accepted), "out of force: 3 objects\n  a.yaml: 2 objects\n  b.yaml: 1 object\n");
        assert_eq!(table(&Accepted::default()), "the empty source is accepted: the policy is empty\n");
    }
}
