//! `vipgate sessions`: listing, which is printed as it comes, so that a table of any size needs little memory; and ending.

use super::output::{json, print, put, span};
use super::show::{block_on, connect};
use super::table::{Table, number, word};
use super::{Ask, Filter, Format};
use crate::admin::proto;
use crate::failure::Failure;

/// Sessions that a person wants to see at once.
const SCREENFUL: u64 = 100;

/// Prints sessions that match: as many as `limit` says, 0 for all; without a word about it, a screenful for people and
/// all for programs.
pub(super) fn list(asked: &Ask, filter: &Filter, limit: Option<u64>) -> Result<(), Failure> {
    let limit = match (limit, asked.output) {
        (Some(0), _) | (None, Format::Json) => u64::MAX,
        (Some(limit), _) => limit,
        (None, Format::Table) => SCREENFUL,
    };
    // One more than is shown, to know whether there is more; 0 asks for all.
    let wanted = limit.checked_add(1).unwrap_or(0);
    let mut paper = Paper::new(asked.output);
    block_on(async {
        let client = connect(asked).await?;
        let mut slices = client.sessions(filter.into(), wanted).await?;
        let mut left = limit;
        let mut truncated = false;
        if !paper.begin()? {
            return Ok(());
        }
        while let Some(slice) = slices.next().await? {
            let take = usize::try_from(left).unwrap_or(usize::MAX).min(slice.len());
            truncated |= take < slice.len();
            left -= take as u64;
            if !paper.write(&slice[..take])? {
                return Ok(());
            }
        }
        paper.end(truncated)
    })
}

/// Ends sessions that match. Those of all pods only when that is what was asked for, not when a filter was forgotten.
pub(super) fn flush(asked: &Ask, filter: &Filter, all: bool) -> Result<(), Failure> {
    let has_filter = *filter != Filter::default();
    if !has_filter && !all {
        let why = "sessions flush: without a filter it would end every session: name which (--endpoint, --vip, --remote, --proto, \
                   --state), or say --all";
        return Err(Failure::usage(why));
    }
    if has_filter && all {
        return Err(Failure::usage("sessions flush: --all and a filter contradict each other"));
    }
    let reply = block_on(async { Ok(connect(asked).await?.flush(filter.into()).await?) })?;
    match asked.output {
        Format::Json => json(&reply),
        Format::Table => print(&format!("{} sessions ended\n", reply.ended)),
    }
}

/// A listing on its way to stdout. Its methods say whether anybody still reads.
enum Paper {
    /// For people.
    Table { table: Table, any: bool },
    /// For programs: `{"sessions": [..], "truncated": ..}`, a session a line.
    Json { any: bool },
}

impl Paper {
    fn new(format: Format) -> Self {
        match format {
            Format::Table => {
                let columns = [
                    word("proto"),
                    word("way"),
                    word("endpoint"),
                    word("vip"),
                    word("remote"),
                    word("state"),
                    number("idle"),
                    number("expires").optional(),
                    number("out").optional(),
                    number("in").optional(),
                    number("worker").optional(),
                ];
                Self::Table { table: Table::new(columns), any: false }
            }
            Format::Json => Self::Json { any: false },
        }
    }

    fn begin(&self) -> Result<bool, Failure> {
        match self {
            Self::Table { .. } => Ok(true),
            Self::Json { .. } => put("{\"sessions\": ["),
        }
    }

    fn write(&mut self, sessions: &[proto::Session]) -> Result<bool, Failure> {
        if sessions.is_empty() {
            return Ok(true);
        }
        match self {
            Self::Table { table, any } => {
                *any = true;
                for session in sessions {
                    table.row(row(session));
                }
                put(&table.take())
            }
            Self::Json { any } => {
                let mut text = String::new();
                for session in sessions {
                    text.push_str(if *any { ",\n" } else { "\n" });
                    *any = true;
                    text.push_str(&serde_json::to_string(session).map_err(Failure::runtime)?);
                }
                put(&text)
            }
        }
    }

    fn end(&self, truncated: bool) -> Result<(), Failure> {
        match self {
            Self::Table { any: false, .. } => print("no sessions match\n"),
            Self::Table { .. } if truncated => print("... and more; --limit 0 shows all\n"),
            Self::Table { .. } => Ok(()),
            Self::Json { .. } => print(&format!("\n], \"truncated\": {truncated}}}\n")),
        }
    }
}

fn row(session: &proto::Session) -> [String; 11] {
    [
        session.protocol.clone(),
        session.direction.clone(),
        session.endpoint.clone(),
        session.vip.clone(),
        session.remote.clone(),
        session.state.clone(),
        span(session.idle_ms.into()),
        span(session.expires_ms.into()),
        session.packets_out.to_string(),
        session.packets_in.to_string(),
        session.worker.to_string(),
    ]
}
