//! The picture. What doesn't fit is left out from the bottom and from the right; what is wrong stands first and in red.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style, Stylize};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Borders, Cell, Paragraph, Row, Sparkline, Table, Wrap};
use vipgate_dataplane::counters::{Direction, DropReason};

use super::sample::{Board, Sample};
use crate::admin::proto::Drop;
use crate::cli::output::{harmless, percent, permille, span};
use crate::cli::{peers, show};

/// The smallest screen that shows something useful.
const LEAST: (u16, u16) = (60, 16);
/// Columns of the box of drops that an example fits in.
const WIDE: u16 = 80;
/// Lines of the boxes at the top: a title and one for each direction.
const UPPER: u16 = 10;

/// Draws everything.
pub(super) fn draw(frame: &mut Frame<'_>, board: &Board) {
    let area = frame.area();
    if area.width < LEAST.0 || area.height < LEAST.1 {
        let text = format!(
            "vipgate top needs {} columns and {} lines; this terminal has {} and {}. `vipgate status` fits anywhere; q ends.",
            LEAST.0, LEAST.1, area.width, area.height
        );
        return frame.render_widget(Paragraph::new(text).wrap(Wrap { trim: true }), area);
    }
    let Some(now) = &board.now else {
        let text = board.lost.as_deref().unwrap_or("looking ..");
        return frame.render_widget(Paragraph::new(harmless(text)).wrap(Wrap { trim: true }), area);
    };
    let wrong = wrong(board, now);
    let alarm = u16::from(!wrong.is_empty());
    let workers = u16::try_from(now.status.workers.len()).unwrap_or(u16::MAX).saturating_add(3).min(area.height / 4);
    let parts = Layout::vertical([
        Constraint::Length(2),
        Constraint::Length(alarm),
        Constraint::Length(UPPER.min(area.height / 2)),
        Constraint::Length(workers),
        Constraint::Min(3),
        Constraint::Length(1),
    ])
    .split(area);
    frame.render_widget(head(now), parts[0]);
    frame.render_widget(Line::from(wrong).style(Style::new().fg(Color::Red).add_modifier(Modifier::BOLD)), parts[1]);
    let upper = Layout::horizontal([Constraint::Percentage(50), Constraint::Percentage(50)]).split(parts[2]);
    traffic(frame, upper[0], board);
    drops(frame, upper[1], board, now);
    frame.render_widget(workers_table(board, now), parts[3]);
    vips(frame, parts[4], board, now);
    let pause = if board.paused { "PAUSED  " } else { "" };
    let keys = Line::from(format!("{pause}q ends, p pauses, arrows scroll the VIPs")).style(Style::new().dim());
    frame.render_widget(keys, parts[5]);
}

fn head(now: &Sample) -> Paragraph<'static> {
    let status = &now.status;
    let policy = status.policy.clone().unwrap_or_default();
    let group = status.group.as_ref().map(|group| format!("  {}", peers::serving(group))).unwrap_or_default();
    let first = Line::from(vec![
        Span::from(harmless(&status.name)).bold(),
        Span::from(format!("  up {}{}", span(status.uptime_seconds * 1000), harmless(&group))),
        Span::from(format!("  policy {}", harmless(&policy.version))),
    ]);
    let second = format!(
        "{} VIPs, {} endpoints, {} Services; vipgate {}, pid {}",
        policy.vips, policy.endpoints, policy.services, status.version, status.pid
    );
    Paragraph::new(vec![first, Line::from(second)])
}

/// What is wrong, on one line.
fn wrong(board: &Board, now: &Sample) -> String {
    let status = &now.status;
    let policy = status.policy.clone().unwrap_or_default();
    let mut all = Vec::new();
    all.extend(board.lost.as_ref().map(|why| format!("NO ANSWER: {why}")));
    all.extend((!status.ready).then(|| "NOT READY".to_owned()));
    let down = status.interfaces.iter().filter(|interface| !interface.up);
    all.extend(down.map(|interface| format!("{} is DOWN", interface.name)));
    let unhealthy = policy.manifests.as_ref().is_some_and(|manifests| !manifests.healthy);
    all.extend(unhealthy.then(|| "manifests EMPTY or UNREADABLE: see `vipgate status`".to_owned()));
    all.extend((!policy.last_error.is_empty()).then(|| "policy REJECTED: see `vipgate status`".to_owned()));
    all.extend(policy.server.filter(|server| !server.connected).map(|_| "policy server NOT CONNECTED".to_owned()));
    if let Some(group) = &status.group {
        all.extend((!group.serving).then(|| "NOT SERVING".to_owned()));
        all.extend(group.draining.then(|| "DRAINING".to_owned()));
        all.extend((group.lease == "lapsed").then(|| "LEASE LAPSED".to_owned()));
    }
    let lost: u64 =
        now.drops.drops.iter().filter(|drop| is_ring_loss(drop)).filter_map(|it| board.dropped(&it.reason)).sum();
    all.extend((lost > 0).then(|| format!("the rings LOSE {} packets/s", short(lost))));
    let claimed = now.vips.vips.iter().filter(|vip| vip.conflict.is_some());
    all.extend(claimed.map(|vip| format!("{} is CLAIMED by another host", vip.address)));
    harmless(&all.join(", "))
}

fn frame_of(title: &str) -> Block<'_> {
    Block::new().borders(Borders::TOP).title(title)
}

fn traffic(frame: &mut Frame<'_>, area: Rect, board: &Board) {
    let rows = Direction::ALL.map(Direction::name).into_iter().map(|direction| {
        let (packets, bits) =
            board.direction(direction).map_or(("-".to_owned(), "-".to_owned()), |(packets, bytes)| {
                (short(packets), short(bytes.saturating_mul(8)))
            });
        let style = if packets == "0" { Style::new().dim() } else { Style::new() };
        Row::new([Cell::from(direction), right(packets), right(bits)]).style(style)
    });
    let widths = [Constraint::Length(13), Constraint::Length(9), Constraint::Length(9)];
    let head = Row::new([Cell::from("direction"), right("packets/s".to_owned()), right("bit/s".to_owned())]).dim();
    let columns = Layout::horizontal([Constraint::Length(35), Constraint::Min(0)]).split(area);
    frame.render_widget(Table::new(rows, widths).header(head).block(frame_of("traffic ")), columns[0]);
    // On a wide screen, how it was.
    let block = frame_of("");
    let inner = block.inner(columns[1]);
    frame.render_widget(block, columns[1]);
    let shown = usize::from(inner.width.saturating_sub(1));
    let history: Vec<u64> = board.history.iter().rev().take(shown).rev().copied().collect();
    if shown >= 10 {
        frame.render_widget(Sparkline::default().data(&history).style(Style::new().fg(Color::Cyan)), inner);
    }
}

fn drops(frame: &mut Frame<'_>, area: Rect, board: &Board, now: &Sample) {
    let status = &now.status;
    let (opened, ended) = board.sessions().map_or(("-".to_owned(), "-".to_owned()), |(a, b)| (short(a), short(b)));
    let used = permille(status.sessions + status.standby_sessions, status.session_capacity);
    let style = if used >= 900 { Style::new().fg(Color::Red) } else { Style::new() };
    // What is cut off first on a narrow screen comes last.
    let standby = match status.standby_sessions {
        0 => String::new(),
        standby => format!(" with {} standby", short(standby)),
    };
    let parts = Layout::vertical([Constraint::Length(3), Constraint::Min(0)]).split(area);
    let lines = vec![
        Line::from(format!("{} of {} ({}{standby})", status.sessions, short(status.session_capacity), percent(used)))
            .style(style),
        Line::from(format!("{opened} opened, {ended} ended a second")),
    ];
    frame.render_widget(Paragraph::new(lines).block(frame_of("sessions ")), parts[0]);
    let mut reasons: Vec<(u64, &Drop)> = now
        .drops
        .drops
        .iter()
        .filter(|drop| drop.packets > 0)
        .map(|drop| (board.dropped(&drop.reason).unwrap_or(0), drop))
        .collect();
    reasons.sort_by_key(|(rate, drop)| std::cmp::Reverse((*rate, drop.packets)));
    let rows = reasons.iter().map(|(rate, drop)| {
        let last = drop.last.as_ref().map(|last| format!("{} {} -> {}", last.protocol, last.source, last.destination));
        // Any other packet is dropped on purpose.
        let style = match *rate {
            0 => Style::new(),
            _ if is_ring_loss(drop) => Style::new().fg(Color::Red),
            _ => Style::new().fg(Color::Yellow),
        };
        Row::new([
            Cell::from(drop.reason.clone()),
            right(short(*rate)),
            right(short(drop.packets)),
            Cell::from(harmless(&last.unwrap_or_default())),
        ])
        .style(style)
    });
    // An example that is cut off says nothing.
    let (last, example) = if area.width >= WIDE { ("last", Constraint::Min(0)) } else { ("", Constraint::Length(0)) };
    let widths = [Constraint::Length(18), Constraint::Length(7), Constraint::Length(7), example];
    let head =
        Row::new([Cell::from("reason"), right("/s".to_owned()), right("all".to_owned()), Cell::from(last)]).dim();
    frame.render_widget(Table::new(rows, widths).header(head).block(frame_of("drops ")), parts[1]);
}

/// Whether these packets were lost before a worker saw them.
fn is_ring_loss(drop: &Drop) -> bool {
    [DropReason::RxNoBuffer, DropReason::RxRingFull, DropReason::RxTooLong]
        .iter()
        .any(|reason| reason.name() == drop.reason)
}

fn workers_table<'a>(board: &Board, now: &Sample) -> Table<'a> {
    let rate = |rate: Option<u64>| right(rate.map_or("-".to_owned(), short));
    let rows = now.status.workers.iter().map(|worker| {
        let number = worker.worker;
        Row::new([
            right(number.to_string()),
            right(worker.core.to_string()),
            right(short(worker.sessions)),
            rate(board.worker(number, |it| it.received)),
            rate(board.worker(number, |it| it.packets.values().sum())),
            rate(board.worker(number, |it| it.drops)),
            rate(board.worker(number, |it| it.handoffs)),
            right(worker.waiting.to_string()),
        ])
    });
    let widths = [6, 5, 9, 10, 10, 8, 10, 8].map(Constraint::Length);
    let titles = ["worker", "core", "sessions", "received/s", "sent on/s", "drops/s", "handoffs/s", "waiting"];
    let head = Row::new(titles.map(|title| right(title.to_owned()))).dim();
    Table::new(rows.collect::<Vec<_>>(), widths).header(head).block(frame_of("workers "))
}

fn vips(frame: &mut Frame<'_>, area: Rect, board: &Board, now: &Sample) {
    let all = &now.vips.vips;
    // A title, a head, and at least one row.
    let shown = usize::from(area.height.saturating_sub(2)).max(1);
    let first = board.scroll.min(all.len().saturating_sub(shown));
    let is_dealt = all.iter().any(|vip| !vip.shares.is_empty());
    let rows = all.iter().skip(first).take(shown).map(|vip| {
        let owner = if is_dealt { show::owners(&vip.shares) } else { String::new() };
        Row::new([
            Cell::from(vip.address.clone()),
            right(short(vip.sessions)),
            right(short(vip.endpoints)),
            Cell::from(harmless(&vip.name)),
            Cell::from(harmless(&owner)),
        ])
        .style(if vip.conflict.is_some() { Style::new().fg(Color::Red) } else { Style::new() })
    });
    let widths = [
        Constraint::Length(20),
        Constraint::Length(9),
        Constraint::Length(9),
        Constraint::Fill(2),
        Constraint::Fill(1),
    ];
    let owner = if is_dealt { "owner" } else { "" };
    let head = Row::new([
        Cell::from("vip"),
        right("sessions".to_owned()),
        right("endpoints".to_owned()),
        Cell::from("name"),
        Cell::from(owner),
    ])
    .dim();
    let title = match all.len() {
        count if count > shown => {
            format!("VIPs {}-{} of {count}, those with most sessions first ", first + 1, first + shown.min(count))
        }
        _ => "VIPs ".to_owned(),
    };
    frame.render_widget(Table::new(rows, widths).header(head).block(frame_of(&title)), area);
}

fn right(text: String) -> Cell<'static> {
    Cell::from(Line::from(text).right_aligned())
}

/// A number in at most five characters: `987`, `9876`, `98.7k`, `1.2M`.
fn short(number: u64) -> String {
    let of = |unit: u64, name: &str| {
        let tenths = number / (unit / 10);
        if tenths < 1000 { format!("{}.{}{name}", tenths / 10, tenths % 10) } else { format!("{}{name}", tenths / 10) }
    };
    match number {
        0..10_000 => number.to_string(),
        10_000..1_000_000 => of(1_000, "k"),
        1_000_000..1_000_000_000 => of(1_000_000, "M"),
        1_000_000_000..1_000_000_000_000 => of(1_000_000_000, "G"),
        _ => of(1_000_000_000_000, "T"),
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::*;
    use crate::admin::proto::{DropsReply, StatusReply, VipsReply};
    use crate::cli::top::picture;

    fn shown(columns: u16, lines: u16, board: &Board) -> String {
        let mut terminal = Terminal::new(TestBackend::new(columns, lines)).unwrap();
        terminal.draw(|frame| draw(frame, board)).unwrap();
        picture(terminal.backend())
    }

    #[test]
    fn numbers_stay_short() {
        let expected = [
            (0, "0"),
            (9_999, "9999"),
            (10_000, "10.0k"),
            (99_999, "99.9k"),
            (999_999, "999k"),
            (1_500_000, "1.5M"),
            (2_345_678_901, "2.3G"),
            (7_000_000_000_000, "7.0T"),
        ];
        for (number, text) in expected {
            assert_eq!(short(number), text);
        }
    }

    #[test]
    fn what_rings_lose_stands_in_red() {
        let sample = |ago, packets: [u64; 2]| Sample {
            at: Instant::now().checked_sub(Duration::from_secs(ago)).unwrap(),
            status: StatusReply { ready: true, ..StatusReply::default() },
            drops: DropsReply {
                drops: [DropReason::RxNoBuffer, DropReason::NoService]
                    .into_iter()
                    .zip(packets)
                    .map(|(reason, packets)| Drop { reason: reason.name().to_owned(), packets, ..Drop::default() })
                    .collect(),
                ..DropsReply::default()
            },
            vips: VipsReply::default(),
        };
        let colour = |before, now, text: &str| {
            let board = Board { before: Some(sample(2, before)), now: Some(sample(1, now)), ..Board::default() };
            let mut terminal = Terminal::new(TestBackend::new(100, 30)).unwrap();
            terminal.draw(|frame| draw(frame, &board)).unwrap();
            let buffer = terminal.backend().buffer();
            let lines: Vec<String> = picture(terminal.backend()).lines().map(str::to_owned).collect();
            let found =
                lines.iter().enumerate().find_map(|(y, line)| Some((line[..line.find(text)?].chars().count(), y)));
            found.map(|(x, y)| buffer[(x as u16, y as u16)].fg)
        };
        assert_eq!(colour([0, 0], [70, 70], "rx_no_buffer"), Some(Color::Red));
        assert_eq!(colour([0, 0], [70, 70], "no_service"), Some(Color::Yellow));
        assert_eq!(colour([0, 0], [70, 70], "the rings LOSE 70 packets/s"), Some(Color::Red));
        // What was lost long ago is no alarm.
        assert_eq!(colour([70, 0], [70, 0], "rx_no_buffer"), Some(Color::Reset));
        assert_eq!(colour([70, 0], [70, 0], "LOSE"), None);
    }

    #[test]
    fn how_full_the_table_is_fits_the_smallest_screen() {
        let of = |sessions, standby_sessions| {
            let status = StatusReply {
                ready: true,
                sessions,
                standby_sessions,
                session_capacity: 65_536,
                ..StatusReply::default()
            };
            let (drops, vips) = (DropsReply::default(), VipsReply::default());
            let now = Some(Sample { at: Instant::now(), status, drops, vips });
            shown(LEAST.0, LEAST.1, &Board { now, ..Board::default() })
        };
        assert!(of(41, 0).contains("41 of 65.5k (0.1 %)"));
        let full = of(61_600, 3_900);
        assert!(full.contains("61600 of 65.5k (100.0 % with"), "{full}");
    }

    #[test]
    fn any_size_of_screen_is_drawn_on() {
        let board = Board { lost: Some("nobody answers".to_owned()), ..Board::default() };
        for columns in [1, 2, 40, 59, 60, 80, 200] {
            for lines in [1, 2, 15, 16, 24, 50] {
                let text = shown(columns, lines, &board);
                assert_eq!(text.lines().count(), usize::from(lines));
            }
        }
        let text = shown(40, 10, &board).replace('\n', " ");
        assert!(text.contains("needs 60 columns and 16 lines"), "{text}");
        assert!(shown(80, 24, &board).starts_with("nobody answers"));
    }
}
