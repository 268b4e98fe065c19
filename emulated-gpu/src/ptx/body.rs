//! Parses the bodies of functions.

use super::parser::{Parsed, Parser};
use super::syntax::{Source, Statement, Step};
use super::types::Type;

impl<'a> Parser<'a> {
    /// Parses the statements of a body, and consumes the brace that closes it.
    pub(super) fn body(&mut self, files: &mut Vec<(u32, String)>) -> Parsed<Vec<Statement<'a>>> {
        let mut found = Vec::new();
        let mut depth = 1;
        let (mut file, mut line) = (0, 0);
        loop {
            let ptx_line = self.line();
            match self.next()? {
                "{" => {
                    depth += 1;
                    found.push(Statement::Open);
                }
                "}" => {
                    depth -= 1;
                    if depth == 0 {
                        return Ok(found);
                    }
                    found.push(Statement::Close);
                }
                ";" => {}
                ".reg" => self.registers(&mut found)?,
                space @ (".shared" | ".local" | ".param") => {
                    found.push(Statement::Variable(self.variable(space)?));
                    self.need(";")?;
                }
                ".loc" => {
                    (file, line) = (self.integer()? as u32, self.integer()? as u32);
                    self.skip_line();
                }
                ".file" => self.file(files)?,
                ".pragma" => while self.next()? != ";" {},
                text if text.starts_with('.') => {
                    self.at -= 1;
                    return self.fail(format!("the directive `{text}` is not supported"));
                }
                text if self.peek() == ":" => {
                    self.at += 1;
                    found.push(Statement::Label(text));
                }
                text => {
                    let source = Source { ptx_line, file, line };
                    found.push(Statement::Step(self.step(text, source)?));
                }
            }
        }
    }

    fn registers(&mut self, found: &mut Vec<Statement<'a>>) -> Parsed<()> {
        let text = self.next()?;
        let Some(ty) = Type::parse(text) else { return self.fail(format!("`{text}` is no type")) };
        loop {
            let name = self.next()?;
            let count = if self.eat("<") {
                let count = self.integer()? as u32;
                self.need(">")?;
                Some(count)
            } else {
                None
            };
            found.push(Statement::Registers { ty, name, count });
            if !self.eat(",") {
                return self.need(";");
            }
        }
    }

    fn step(&mut self, first: &'a str, source: Source) -> Parsed<Step<'a>> {
        let (mut mnemonic, mut guard) = (first, None);
        if first == "@" {
            let negated = self.eat("!");
            guard = Some((self.next()?, negated));
            mnemonic = self.next()?;
        }
        Ok(Step { guard, mnemonic, operands: self.operands(";")?, source })
    }
}
