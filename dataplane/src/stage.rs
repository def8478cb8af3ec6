//! What happens to a packet, one stage a file, in this order: unwrap, parse, answer, gather, relay, lookup, express, takeover, recheck,
//! errors, classify, open, serve, rewrite, which asks route, stateless, health, wrap, and refuse, which like health asks say. A stage is a function over a
//! batch and is given exactly the tables that it may read or change.

pub mod answer;
pub mod classify;
pub mod errors;
pub mod express;
pub mod gather;
pub mod health;
pub mod lookup;
pub mod open;
pub mod parse;
pub mod recheck;
pub mod refuse;
pub mod relay;
pub mod rewrite;
pub mod route;
pub mod say;
pub mod serve;
pub mod stateless;
pub mod takeover;
pub mod unwrap;
pub mod wrap;
