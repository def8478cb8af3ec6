//! `vipgate policyd`: compiles what people write into what gateways need, and serves it to them.

pub mod source;
