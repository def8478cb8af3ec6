//! `vipgate policy accept-empty`: tells a gateway with policy in files, or a policy server, that a source is empty on purpose.

use std::fmt::Write;
use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

use super::output::{self, harmless};
use super::show::block_on;
use super::{Format, policy};
use crate::admin::Client;
use crate::failure::Failure;
use crate::xds::proto::AcceptEmptyRequest;

/// Who is told, and how to show what becomes of it.
#[derive(Clone, Debug, Args)]
pub(super) struct AcceptEmpty {
    /// Admin socket of a gateway whose policy is in files
    #[arg(long, value_name = "PATH", default_value = "/run/vipgate/gateway.sock", conflicts_with = "server")]
    socket: PathBuf,
    /// Where a policy server listens, instead
    #[arg(long, value_name = "URL")]
    server: Option<String>,
    #[command(flatten)]
    files: policy::Files,
    /// How to show the answer
    #[arg(short, long, value_enum, default_value_t = Format::Table)]
    output: Format,
}

/// What went out of force.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
struct Accepted {
    objects: u64,
    texts: Vec<Text>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Text {
    name: String,
    objects: u64,
}

pub(super) fn run(asked: &AcceptEmpty) -> Result<(), Failure> {
    let texts: Vec<Text> = if let Some(url) = &asked.server {
        let request = async |mut client: policy::StatusClient| client.accept_empty(AcceptEmptyRequest {}).await;
        let reply = block_on(policy::call(url, &asked.files, request))?;
        reply.texts.into_iter().map(|it| Text { name: it.name, objects: it.objects }).collect()
    } else {
        let reply = block_on(async { Ok(Client::connect(&asked.socket).await?.accept_empty().await?) })?;
        reply.texts.into_iter().map(|it| Text { name: it.name, objects: it.objects }).collect()
    };
    let accepted = Accepted { objects: texts.iter().map(|text| text.objects).sum(), texts };
    match asked.output {
        Format::Json => output::json(&accepted),
        Format::Table => output::print(&harmless(&table(&accepted))),
    }
}

fn table(accepted: &Accepted) -> String {
    if accepted.texts.is_empty() {
        return "the source is taken as empty: the policy is\n".to_owned();
    }
    let count = |objects: u64| if objects == 1 { "1 object".to_owned() } else { format!("{objects} objects") };
    let mut out = format!("out of force: {}\n", count(accepted.objects));
    for Text { name, objects } in &accepted.texts {
        // Writing to a String can't fail.
        let _ = writeln!(out, "  {name}: {}", count(*objects));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_went_is_counted_by_text() {
        let text = |name: &str, objects| Text { name: name.to_owned(), objects };
        let accepted = Accepted { objects: 3, texts: vec![text("a.yaml", 2), text("b.yaml", 1)] };
        assert_eq!(table(&accepted), "out of force: 3 objects\n  a.yaml: 2 objects\n  b.yaml: 1 object\n");
        assert_eq!(table(&Accepted::default()), "the source is taken as empty: the policy is\n");
    }
}
