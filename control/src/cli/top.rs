//! `vipgate top`: a gateway at a glance, again and again. Only what other commands ask for is asked for, once a second.

mod sample;
mod view;

use std::io::IsTerminal;
use std::thread;
use std::time::Duration;

use clap::Args;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};

use self::sample::{Board, Sample};
use self::view::draw;
use super::output;
use super::show::block_on;
use crate::admin::{Client, ClientError};
use crate::config::units::parse_duration;
use crate::failure::Failure;

/// How to look.
#[derive(Clone, Debug, Args)]
pub(super) struct Top {
    /// Admin socket of the gateway
    #[arg(long, value_name = "PATH", default_value = "/run/vipgate/gateway.sock")]
    socket: std::path::PathBuf,
    /// How often to look
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = parse_duration)]
    every: Duration,
    /// Look twice, print one picture as text, and end: of the terminal's size, or COLUMNSxLINES
    #[arg(long, value_name = "SIZE", num_args = 0..=1, default_missing_value = "", value_parser = size)]
    once: Option<Size>,
}

/// Columns and lines; `None`: the terminal's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Size(Option<(u16, u16)>);

fn size(text: &str) -> Result<Size, String> {
    if text.is_empty() {
        return Ok(Size(None));
    }
    let parts = text.split_once('x').and_then(|(columns, lines)| Some((columns.parse().ok()?, lines.parse().ok()?)));
    let fits = |size: &(u16, u16)| (1..=1000).contains(&size.0) && (1..=1000).contains(&size.1);
    parts.filter(fits).map(|size| Size(Some(size))).ok_or_else(|| "expected COLUMNSxLINES, such as 80x24".to_owned())
}

/// The shortest time between two looks.
const SHORTEST: Duration = Duration::from_millis(100);

pub(super) fn run(asked: &Top) -> Result<(), Failure> {
    let every = asked.every.max(SHORTEST);
    match asked.once {
        Some(size) => once(asked, size, every),
        None if std::io::stdout().is_terminal() && std::io::stdin().is_terminal() => live(asked, every),
        None => Err(Failure::usage(
            "top needs a terminal; `vipgate top --once` prints one picture, `vipgate status -o json` and /metrics are for programs",
        )),
    }
}

/// One picture as text.
fn once(asked: &Top, size: Size, every: Duration) -> Result<(), Failure> {
    let board = block_on(async {
        let mut board = Board::default();
        board.add(look(asked).await?);
        tokio::time::sleep(every).await;
        board.add(look(asked).await?);
        Ok(board)
    })?;
    let terminal = || ratatui::crossterm::terminal::size().ok().filter(|_| std::io::stdout().is_terminal());
    let (columns, lines) = size.0.or_else(terminal).unwrap_or((80, 24));
    let mut terminal = Terminal::new(TestBackend::new(columns, lines)).map_err(Failure::runtime)?;
    terminal.draw(|frame| draw(frame, &board)).map_err(Failure::runtime)?;
    output::print(&picture(terminal.backend()))
}

/// The cells of a screen as lines of text.
fn picture(backend: &TestBackend) -> String {
    let buffer = backend.buffer();
    let line = |y| (0..buffer.area.width).map(|x| buffer[(x, y)].symbol()).collect::<String>();
    let lines: Vec<String> = (0..buffer.area.height).map(|y| format!("{}\n", line(y).trim_end())).collect();
    lines.concat()
}

/// What may happen beside time.
enum Press {
    Quit,
    Pause,
    Up,
    Down,
    /// The screen has another size.
    Redraw,
}

/// The live view, until somebody has seen enough.
fn live(asked: &Top, every: Duration) -> Result<(), Failure> {
    // Who can't be asked at all is told so on a screen that stays.
    block_on(async { Ok(Client::connect(&asked.socket).await?) })?;
    let mut terminal =
        ratatui::try_init().map_err(|error| Failure::runtime(format_args!("cannot draw on this terminal: {error}")))?;
    let outcome = block_on(follow(asked, every, &mut terminal));
    ratatui::restore();
    outcome
}

async fn follow(asked: &Top, every: Duration, terminal: &mut ratatui::DefaultTerminal) -> Result<(), Failure> {
    let mut presses = presses();
    let mut board = Board::default();
    let mut next = Instant::now();
    loop {
        terminal.draw(|frame| draw(frame, &board)).map_err(Failure::runtime)?;
        tokio::select! {
            () = sleep_until(next), if !board.paused => {
                match look(asked).await {
                    Ok(sample) => board.add(sample),
                    // It may be back in a moment.
                    Err(error) => board.lost = Some(error.to_string()),
                }
                next = Instant::now() + every;
            }
            press = presses.recv() => match press {
                None | Some(Press::Quit) => return Ok(()),
                Some(Press::Pause) => board.paused = !board.paused,
                Some(Press::Up) => board.scroll = board.scroll.saturating_sub(1),
                Some(Press::Down) => board.scroll = board.scroll.saturating_add(1),
                Some(Press::Redraw) => {}
            }
        }
    }
}

async fn look(asked: &Top) -> Result<Sample, ClientError> {
    let mut client = Client::connect(&asked.socket).await?;
    Sample::take(&mut client).await
}

/// Keys, from a thread that ends with the process: a terminal can only be waited for.
fn presses() -> mpsc::UnboundedReceiver<Press> {
    let (sender, receiver) = mpsc::unbounded_channel();
    thread::spawn(move || {
        while let Ok(event) = event::read() {
            let press = match event {
                Event::Key(key) if key.kind == KeyEventKind::Press => press(key),
                Event::Resize(..) => Some(Press::Redraw),
                _ => None,
            };
            if let Some(press) = press
                && sender.send(press).is_err()
            {
                return;
            }
        }
    });
    receiver
}

fn press(key: KeyEvent) -> Option<Press> {
    match key.code {
        KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => Some(Press::Quit),
        KeyCode::Char('q') | KeyCode::Esc => Some(Press::Quit),
        KeyCode::Char('p' | ' ') => Some(Press::Pause),
        KeyCode::Up | KeyCode::Char('k') => Some(Press::Up),
        KeyCode::Down | KeyCode::Char('j') => Some(Press::Down),
        _ => None,
    }
}
