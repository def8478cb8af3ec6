//! The AWS provider against a fake of AWS.

mod binding;
mod credentials;
mod faults;
mod flow;
mod rules;
mod smoke;
pub(crate) mod world;
