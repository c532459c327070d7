-- quarantine: rows that cannot be used. They never stop a source by themselves.
-- Grain: one row per bad source row.
--   source      varchar  where it stands in the recipe, and what it is
--   row_number  bigint   1 for the first row of the source (of a JSONL file: the line)
--   row_id      varchar  the source's own name for the row; null without one
--   reason      varchar  the rule the row breaks
--   row_text    varchar  the row as it was read: a line, or of a table the columns that the source names
with final as (
    select source, row_number, row_id, reason, row_text
    from stg_rows
    where reason is not null
    order by pool_order, row_number
)

select * from final
